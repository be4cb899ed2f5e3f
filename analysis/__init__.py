"""Comparisons of runs: local records -> dataframes -> statistics, tables and pictures -> one report."""
