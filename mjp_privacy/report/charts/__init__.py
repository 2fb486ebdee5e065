"""The charts of a report, drawn by matplotlib and shown as inline SVG."""
