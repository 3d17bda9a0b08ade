"""The methods that the paper compares with, a file each, and broken controls for audits."""
