"""Training jobs of the frameworks, as processes of their own."""
