"""Models and transformations of other libraries: checks, and errors with a remedy."""
