"""The router: text in, text out. It knows tokens and load, never tensors."""
