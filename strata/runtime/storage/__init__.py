"""Plans and bundles as files."""
