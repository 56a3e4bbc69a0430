"""The run log and all that reads it: ``runlog`` writes and reads the file, ``facts`` are figures computed from its
records, ``words``, ``table`` and ``picture`` show them, ``report`` ends a job with them, ``replay`` repeats the
controller's decisions and ``forecast`` predicts other jobs.

Training imports ``runlog`` alone. ``words``, ``table``, ``picture`` and ``report`` are imported when a report is made.
"""
