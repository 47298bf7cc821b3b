"""Linear methods that keep weights in fewer bits, one file each; methods.py has the table of their names."""
