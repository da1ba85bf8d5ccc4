"""The worker: one model on one device. Token ids in, token ids out; it maps the KV memory and does not own it."""
