"""States to files and back: state dicts, snapshots, files, directories, conversions at a load."""
