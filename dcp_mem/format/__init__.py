"""What the bytes mean: frames and layouts of segments, manifests, DCP metadata, checksums, names."""
