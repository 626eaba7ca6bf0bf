"""Cut a student from its teacher."""
