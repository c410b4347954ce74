"""Extras: a folder each, which one removes by removing the folder; the files beside them serve several extras."""
