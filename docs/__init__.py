"""Pages of the site, and what builds them."""
