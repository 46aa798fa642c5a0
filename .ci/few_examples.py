"""A plugin of pytest: Hypothesis tries few examples, always the same, however long one takes."""

from hypothesis import settings

settings.register_profile("few", deadline=None, derandomize=True, database=None, max_examples=10)
settings.load_profile("few")
