"""What is measured, and against which target: one module per question."""
