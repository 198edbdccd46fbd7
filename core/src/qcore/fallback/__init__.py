"""The built-in plugin ``torch``: serves every request, on any device, with torch's own ops."""
