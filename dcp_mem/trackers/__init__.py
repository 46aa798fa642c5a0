"""Figures of checkpoints, for whoever collects them: MLflow, TensorBoard, OpenMetrics, JSON lines."""
