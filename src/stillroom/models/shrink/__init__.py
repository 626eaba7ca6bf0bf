"""A student cut from its teacher."""
