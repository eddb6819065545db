"""Messages and images to token ids."""
