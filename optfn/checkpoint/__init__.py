"""States to files and back: state dicts, snapshots, files, directories, what a load changes."""
