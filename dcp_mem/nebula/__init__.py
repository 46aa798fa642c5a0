"""The API of Azure ML's Nebula package."""
