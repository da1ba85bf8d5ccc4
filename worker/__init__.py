"""One model on one device: weights and compute; token ids in, token ids out."""
