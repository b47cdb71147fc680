"""What every op family builds on: front-end arguments, the element-wise base class, movement, creation."""
