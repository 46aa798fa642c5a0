"""What operators ask of checkpoints without a training loop: what there is, whether it is whole, take it elsewhere, or away."""
