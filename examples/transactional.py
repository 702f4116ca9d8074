"""Enqueue in your own transaction: the order and its job are both there, or neither is.

Here with SQLAlchemy, on the same SQLite file as Onward's tables. SQLAlchemy opens it with
Python's sqlite3, so Onward must too (`sqlite_driver`): two SQLite libraries in one process on one
file cancel each other's locks. On PostgreSQL nothing needs to be set.

Run it: python transactional.py. It runs its own worker.
"""

from __future__ import annotations

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from onward import Onward

engine = create_engine("sqlite:///shop.db")
app = Onward("sqlite:///shop.db", sqlite_driver="sqlite3")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    book: Mapped[str]
    is_packed: Mapped[bool] = mapped_column(default=False)


@app.task
def pack(order_id: int) -> str:
    """The order is there for sure: the job exists only because the order was committed."""
    with Session(engine) as session, session.begin():
        order = session.get_one(Order, order_id)
        order.is_packed = True  # set, not added to: it may run twice
        return order.book


def place_order(book: str, *, fails: bool = False) -> None:
    with Session(engine) as session, session.begin():
        order = Order(book=book)
        session.add(order)
        session.flush()
        pack.using(connection=session).enqueue(order.id)
        if fails:
            raise ConnectionError("the payment service hung up")


def main() -> None:
    Base.metadata.create_all(engine)
    app.database.migrate()  # Onward's own tables, as `onward db init` makes them
    place_order("Middlemarch")
    try:
        place_order("Ulysses", fails=True)
    except ConnectionError as error:
        print(f"no order, no job: {error}")
    app.run_worker(until_empty=True)
    with Session(engine) as session:
        print("packed:", [order.book for order in session.query(Order) if order.is_packed])
    print("jobs:", app.counts()["succeeded"])


if __name__ == "__main__":
    main()
