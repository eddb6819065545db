"""Scripts that a test runs in processes of their own, and what starts them."""
