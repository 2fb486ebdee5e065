"""The only files that know the package breaching: its closed form and its gradient matching."""
