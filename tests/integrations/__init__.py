"""Tests with frameworks and trackers: DeepSpeed, Hugging Face, Lightning, Megatron, MLflow."""
