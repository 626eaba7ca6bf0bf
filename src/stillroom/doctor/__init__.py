"""One table of rules: what is wrong, or could be better, before a run (`doctor`), in it, and after it (`diagnose`).

`rules`, `log_rules` and `checks` import no torch: the engine asks them, and a diagnosis reads JSON. `setup_rules` and
`examine` load models and data and stand above the engine.
"""
