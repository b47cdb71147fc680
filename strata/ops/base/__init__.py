"""What every family of ops is written with: front-end arguments, the element-wise base class, movement, creation."""
