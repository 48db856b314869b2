"""A journal as a Spark table: write messages, decode them, find the gaps, publish the answer as messages again."""

import tempfile
from pathlib import Path

from penstock.journal import Journal
from penstock.spark import decode, session
from penstock.spark.pipelines import quality, rollup


def main() -> None:
    work = Path(tempfile.mkdtemp(prefix="penstock-example-"))
    with Journal(work / "measurements") as journal:
        for number in range(1000):
            journal.append(f"car.{number % 3}", b'{"speed": %d}' % (number % 50))
        journal.append("car.0", b"not json")

    spark = session(master="local[2]", **{"spark.log.level": "ERROR"})
    frame = spark.read.format("penstock").load(str(work / "measurements"))
    cars = decode.json(frame, "speed double")
    print("corrupt:", cars.filter("_corrupt is not null").count())
    means = rollup(cars, {"mean": "avg(value.speed)", "messages": "count(*)"}, window="1 hour")
    means.show()
    quality(frame).select("topic", "messages", "missing", "duplicates").show()
    answers = means.selectExpr("concat('mean.', topic) as topic", "cast(mean as string) as payload")
    answers.write.format("penstock").mode("append").save(str(work / "answers"))
    print("answers:", spark.read.format("penstock").load(str(work / "answers")).count())
    spark.stop()


if __name__ == "__main__":
    main()
