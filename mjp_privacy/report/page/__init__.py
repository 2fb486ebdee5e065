"""index.html: the whole report in one file that works offline."""
