"""OptEq and Deep OptEq (Xie et al., TPAMI 2022): cells, networks, theory, named models."""
