"""Image models: preprocessing from the folder's own settings, vectors, labels, masks and boxes of images."""
