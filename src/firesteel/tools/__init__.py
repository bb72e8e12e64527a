"""What people use beside `fs.compile`: doctor, explain, debug, report.  Each file is loaded when it is first asked for."""
