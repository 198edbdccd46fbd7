"""A complete third-party plugin that needs no hardware."""
