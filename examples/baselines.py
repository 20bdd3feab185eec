def attach(*a):
    class S: phase="dense"; bytes_sent=1
    return S()
