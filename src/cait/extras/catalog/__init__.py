"""Data sets by name: torchvision's, Hugging Face's, and ImageNet's downloaded archives."""
