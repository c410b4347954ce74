"""Image classification with a network, a loss and data of one's own, trained by cait."""
