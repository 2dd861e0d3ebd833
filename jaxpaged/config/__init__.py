"""Settings: frozen, refusing what cannot work, and the flags generated from them."""
