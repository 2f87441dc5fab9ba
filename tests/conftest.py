"""Its being here puts this directory on the import path, for helpers that test folders share."""
