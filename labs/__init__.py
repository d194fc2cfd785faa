"""The course: labs/lab-01 to labs/lab-11, and labs/kit, its tooling. Start with `python -m labs`."""
