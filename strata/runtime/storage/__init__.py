"""Plans and named parts as files."""
