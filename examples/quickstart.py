"""The first job. In one terminal: onward worker quickstart:app. In another: python quickstart.py"""

from onward import Onward

app = Onward()  # the file onward.db beside you; or Onward("postgresql://…")


@app.task
def add(x: int, y: int) -> int:
    return x + y


if __name__ == "__main__":
    print(add.enqueue(1, 2).wait(timeout=30))
