"""Labs to be written and judged in a web page: run.py judges, build.py makes the site out of page/."""
