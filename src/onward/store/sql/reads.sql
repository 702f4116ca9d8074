-- What people and callers look at. Every read of jobs goes through the one view of the live and the cold table.

-- name: now
-- The database's clock, in seconds since the epoch.
-- sqlite
SELECT onward.clock()
-- postgres
SELECT CAST(extract(epoch FROM onward.clock()) AS float8)

-- name: job
-- One job as a decision sees it.
-- sqlite
SELECT id, task, queue, priority, state, attempt, worker, args, max_attempts, max_losses, failures, losses, budget_from,
       timeout
FROM onward.jobs WHERE id = :id
-- postgres
SELECT CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), args, max_attempts, max_losses,
       failures, losses, budget_from, timeout
FROM onward.jobs WHERE id = CAST(:id AS uuid)

-- name: record
-- One job with everything that is known of it. Times are in seconds since the epoch.
-- sqlite
SELECT id, task, queue, priority, state, attempt, worker, args, max_attempts, max_losses, failures, losses, budget_from,
       timeout, run_at, started_at, finished_at, created_at, event, reason, error, result
FROM onward.jobs WHERE id = :id
-- postgres
SELECT CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), args, max_attempts, max_losses,
       failures, losses, budget_from, timeout, CAST(extract(epoch FROM run_at) AS float8),
       CAST(extract(epoch FROM started_at) AS float8), CAST(extract(epoch FROM finished_at) AS float8),
       CAST(extract(epoch FROM created_at) AS float8), event, reason, error, result
FROM onward.jobs WHERE id = CAST(:id AS uuid)

-- name: records
-- The same of those of these jobs that are there.
-- sqlite
SELECT id, task, queue, priority, state, attempt, worker, args, max_attempts, max_losses, failures, losses, budget_from,
       timeout, run_at, started_at, finished_at, created_at, event, reason, error, result
FROM onward.jobs WHERE id IN (SELECT value FROM json_each(:ids))
-- postgres
SELECT CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), args, max_attempts, max_losses,
       failures, losses, budget_from, timeout, CAST(extract(epoch FROM run_at) AS float8),
       CAST(extract(epoch FROM started_at) AS float8), CAST(extract(epoch FROM finished_at) AS float8),
       CAST(extract(epoch FROM created_at) AS float8), event, reason, error, result
FROM onward.jobs WHERE id = ANY(ARRAY(SELECT CAST(value AS uuid) FROM json_array_elements_text(CAST(:ids AS json))))

-- name: list
-- A page of jobs, highest id first: `:before` is the last id of the page before. Arguments, results and errors are
-- not loaded. A filter that is NULL does not filter; a name is compared as it is, so no character is a wildcard.
-- sqlite
SELECT id, task, queue, priority, state, attempt, worker, max_attempts, max_losses, failures, losses, run_at, started_at,
       finished_at, created_at, reason
FROM onward.jobs
WHERE (:before IS NULL OR id < :before) AND (:state IS NULL OR state = :state) AND (:queue IS NULL OR queue = :queue)
  AND (:task IS NULL OR task = :task)
ORDER BY id DESC LIMIT :limit
-- postgres
SELECT CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), max_attempts, max_losses, failures,
       losses, CAST(extract(epoch FROM run_at) AS float8), CAST(extract(epoch FROM started_at) AS float8),
       CAST(extract(epoch FROM finished_at) AS float8), CAST(extract(epoch FROM created_at) AS float8), reason
FROM onward.jobs
WHERE (CAST(:before AS uuid) IS NULL OR id < CAST(:before AS uuid))
  AND (CAST(:state AS text) IS NULL OR state = CAST(:state AS text))
  AND (CAST(:queue AS text) IS NULL OR queue = CAST(:queue AS text))
  AND (CAST(:task AS text) IS NULL OR task = CAST(:task AS text))
ORDER BY id DESC LIMIT :limit

-- name: ids_like
-- The ids that begin with a few characters, for people who type: the bounds are the smallest and the largest such id.
-- sqlite
SELECT id FROM onward.jobs WHERE id BETWEEN :low AND :high ORDER BY id LIMIT 5
-- postgres
SELECT CAST(id AS text) FROM onward.jobs WHERE id BETWEEN CAST(:low AS uuid) AND CAST(:high AS uuid) ORDER BY id LIMIT 5

-- name: dead
-- A page of dead jobs, highest id first, each with the error of its last attempt; with :until, those that died by then. Page
-- after page is read: so that SQLite goes on where the last one ended, `:before` bounds the index (no id is behind a 'g').
-- sqlite
SELECT j.id, j.task, j.queue, j.attempt, j.failures, j.losses, j.finished_at, a.reason, substr(a.error, 1, 2000)
FROM onward.job AS j LEFT JOIN onward.attempt AS a ON a.job = j.id AND a.number = j.attempt
WHERE j.state = 'dead' AND j.id < coalesce(:before, 'g') AND (:queue IS NULL OR j.queue = :queue)
  AND (:task IS NULL OR j.task = :task) AND (:until IS NULL OR j.finished_at <= :until)
ORDER BY j.id DESC LIMIT :limit
-- postgres
SELECT CAST(j.id AS text), j.task, j.queue, j.attempt, j.failures, j.losses,
       CAST(extract(epoch FROM j.finished_at) AS float8), a.reason, left(a.error, 2000)
FROM onward.job AS j LEFT JOIN onward.attempt AS a ON a.job = j.id AND a.number = j.attempt
WHERE j.state = 'dead' AND (CAST(:before AS uuid) IS NULL OR j.id < CAST(:before AS uuid))
  AND (CAST(:queue AS text) IS NULL OR j.queue = CAST(:queue AS text))
  AND (CAST(:task AS text) IS NULL OR j.task = CAST(:task AS text))
  AND (CAST(:until AS float8) IS NULL OR j.finished_at <= to_timestamp(CAST(:until AS float8)))
ORDER BY j.id DESC LIMIT :limit

-- name: pending
-- A page of jobs that wait to begin, highest id first; with :until, those that were enqueued by then. Read like the dead.
-- sqlite
SELECT id, task, queue, attempt, state, created_at
FROM onward.job
WHERE state IN ('queued', 'waiting') AND id < coalesce(:before, 'g') AND (:queue IS NULL OR queue = :queue)
  AND (:task IS NULL OR task = :task) AND (:until IS NULL OR created_at <= :until)
ORDER BY id DESC LIMIT :limit
-- postgres
SELECT CAST(id AS text), task, queue, attempt, state, CAST(extract(epoch FROM created_at) AS float8)
FROM onward.job
WHERE state IN ('queued', 'waiting') AND (CAST(:before AS uuid) IS NULL OR id < CAST(:before AS uuid))
  AND (CAST(:queue AS text) IS NULL OR queue = CAST(:queue AS text))
  AND (CAST(:task AS text) IS NULL OR task = CAST(:task AS text))
  AND (CAST(:until AS float8) IS NULL OR created_at <= to_timestamp(CAST(:until AS float8)))
ORDER BY id DESC LIMIT :limit

-- name: names
-- Which queues and tasks live jobs have: what somebody who mistyped one may have meant.
-- both
SELECT DISTINCT queue, task FROM onward.job

-- name: attempts
-- Every closed attempt of one job, in order; of a lost one also when its worker was last heard of, as long as the worker is
-- remembered: the end of such an attempt is when that was noticed.
-- sqlite
SELECT job, number, state, event, worker, started_at, ended_at, abandoned, reason, error,
       CASE WHEN state = 'lost' THEN (SELECT w.beat_at FROM onward.worker AS w WHERE w.id = a.worker) END
FROM onward.attempts AS a WHERE job = :id ORDER BY number
-- postgres
SELECT CAST(job AS text), number, state, event, CAST(worker AS text), CAST(extract(epoch FROM started_at) AS float8),
       CAST(extract(epoch FROM ended_at) AS float8), abandoned, reason, error,
       CASE WHEN state = 'lost' THEN (SELECT CAST(extract(epoch FROM w.beat_at) AS float8) FROM onward.worker AS w
                                      WHERE w.id = a.worker) END
FROM onward.attempts AS a WHERE job = CAST(:id AS uuid) ORDER BY number

-- name: attempt
-- One closed attempt.
-- sqlite
SELECT job, number, state, event, worker, started_at, ended_at, abandoned, reason, error
FROM onward.attempts WHERE job = :id AND number = :number
-- postgres
SELECT CAST(job AS text), number, state, event, CAST(worker AS text), CAST(extract(epoch FROM started_at) AS float8),
       CAST(extract(epoch FROM ended_at) AS float8), abandoned, reason, error
FROM onward.attempts WHERE job = CAST(:id AS uuid) AND number = :number

-- name: refusals
-- Refused writes, newest first; of one job, or of all.
-- sqlite
SELECT job, event, attempt, worker, expected, found, found_attempt, found_worker, detail, at
FROM onward.refusal WHERE :id IS NULL OR job = :id ORDER BY id DESC LIMIT :limit
-- postgres
SELECT CAST(job AS text), event, attempt, CAST(worker AS text), expected, found, found_attempt,
       CAST(found_worker AS text), detail, CAST(extract(epoch FROM at) AS float8)
FROM onward.refusal WHERE CAST(:id AS uuid) IS NULL OR job = CAST(:id AS uuid) ORDER BY id DESC LIMIT :limit

-- name: counts
-- How many jobs are in each state.
-- both
SELECT state, count(*) FROM onward.jobs GROUP BY state

-- name: queues
-- Each queue's live jobs by state, and the age in seconds of the oldest due one.
-- sqlite
SELECT queue, state, count(*), sum(CASE WHEN state = 'queued' AND run_at <= onward.clock() THEN 1 ELSE 0 END),
       max(CASE WHEN state = 'queued' AND run_at <= onward.clock() THEN onward.clock() - run_at END)
FROM onward.job GROUP BY queue, state ORDER BY queue, state
-- postgres
SELECT queue, state, count(*), count(*) FILTER (WHERE state = 'queued' AND run_at <= onward.clock()),
       CAST(extract(epoch FROM max(onward.clock() - run_at) FILTER (WHERE state = 'queued' AND run_at <= onward.clock()))
            AS float8)
FROM onward.job GROUP BY queue, state ORDER BY queue, state

-- name: waiting_tasks
-- Which (queue, task) pairs have due jobs, and how many: held against what the live workers know.
-- both
SELECT queue, task, count(*) FROM onward.job WHERE state = 'queued' AND run_at <= onward.clock()
GROUP BY queue, task ORDER BY queue, task

-- name: due_tasks
-- Which (queue, task) pairs have due jobs, how many, and for how many seconds the first has been due. First which lanes
-- there are, by a probe for each, then what is due in each: jobs of tomorrow are not read, however many there are.
-- SQLite, once it has statistics, would rather make an index of its own of everything that is queued. Of an array PostgreSQL
-- expects ten rows; of the lanes themselves ten thousand, and would compile the statement (JIT) for 350 ms.
-- sqlite
WITH RECURSIVE place (queue) AS (
    SELECT min(queue) FROM onward.job WHERE state = 'queued'
    UNION ALL
    SELECT (SELECT min(queue) FROM onward.job WHERE state = 'queued' AND queue > place.queue)
    FROM place WHERE place.queue IS NOT NULL
), lane (queue, priority) AS (
    SELECT p.queue, (SELECT max(priority) FROM onward.job WHERE state = 'queued' AND queue = p.queue)
    FROM place AS p WHERE p.queue IS NOT NULL
    UNION ALL
    SELECT lane.queue, (SELECT max(priority) FROM onward.job
                        WHERE state = 'queued' AND queue = lane.queue AND priority < lane.priority)
    FROM lane WHERE lane.priority IS NOT NULL
)
SELECT j.queue, j.task, count(*), onward.clock() - min(j.run_at)
FROM lane CROSS JOIN onward.job AS j INDEXED BY onward.job_due
WHERE j.state = 'queued' AND j.queue = lane.queue AND j.priority = lane.priority AND j.run_at <= onward.clock()
GROUP BY j.queue, j.task ORDER BY j.queue, j.task
-- postgres
WITH RECURSIVE place (queue) AS (
    SELECT min(queue) FROM onward.job WHERE state = 'queued'
    UNION ALL
    SELECT (SELECT min(queue) FROM onward.job WHERE state = 'queued' AND queue > place.queue)
    FROM place WHERE place.queue IS NOT NULL
), lane (queue, priority) AS (
    SELECT p.queue, (SELECT max(priority) FROM onward.job WHERE state = 'queued' AND queue = p.queue)
    FROM unnest(ARRAY(SELECT queue FROM place WHERE queue IS NOT NULL)) AS p (queue)
    UNION ALL
    SELECT lane.queue, (SELECT max(priority) FROM onward.job
                        WHERE state = 'queued' AND queue = lane.queue AND priority < lane.priority)
    FROM lane WHERE lane.priority IS NOT NULL
)
SELECT d.queue, d.task, CAST(sum(d.due) AS bigint), CAST(extract(epoch FROM onward.clock() - min(d.first)) AS float8)
FROM unnest(ARRAY(SELECT queue FROM lane WHERE priority IS NOT NULL),
            ARRAY(SELECT priority FROM lane WHERE priority IS NOT NULL)) AS l (queue, priority)
CROSS JOIN LATERAL (
    SELECT j.queue, j.task, count(*) AS due, min(j.run_at) AS first FROM onward.job AS j
    WHERE j.state = 'queued' AND j.queue = l.queue AND j.priority = l.priority AND j.run_at <= onward.clock()
    GROUP BY j.queue, j.task
) AS d
GROUP BY d.queue, d.task ORDER BY d.queue, d.task

-- name: held
-- How many jobs each of these workers has of each queue, and when it began the newest of them.
-- sqlite
SELECT worker, queue, count(*), max(started_at) FROM onward.job
WHERE worker IN (SELECT value FROM json_each(:ids)) GROUP BY worker, queue
-- postgres
SELECT CAST(worker AS text), queue, count(*), CAST(extract(epoch FROM max(started_at)) AS float8) FROM onward.job
WHERE worker = ANY(ARRAY(SELECT CAST(value AS uuid) FROM json_array_elements_text(CAST(:ids AS json))))
GROUP BY worker, queue

-- name: newest_ended
-- Of the jobs that ended in the last :seconds, when each worker began the newest: by that one is seen that claims jobs which
-- are over before anybody looks.
-- sqlite
SELECT worker, max(started_at) FROM onward.finished
WHERE state IN ('succeeded', 'cancelled') AND finished_at > onward.clock() - :seconds AND worker IS NOT NULL GROUP BY worker
-- postgres
SELECT CAST(worker AS text), CAST(extract(epoch FROM max(started_at)) AS float8) FROM onward.finished
WHERE state IN ('succeeded', 'cancelled') AND finished_at > onward.clock() - CAST(:seconds AS float8) * interval '1 second'
  AND worker IS NOT NULL
GROUP BY worker

-- name: finished_since
-- How many jobs ended in the last :seconds, by state.
-- sqlite
SELECT state, count(*) FROM onward.finished WHERE finished_at > onward.clock() - :seconds GROUP BY state
-- postgres
SELECT state, count(*) FROM onward.finished
WHERE finished_at > onward.clock() - CAST(:seconds AS float8) * interval '1 second' GROUP BY state

-- name: jobs_among
-- Several jobs as a decision sees them, for moves in bulk.
-- sqlite
SELECT id, task, queue, priority, state, attempt, worker, args, max_attempts, max_losses, failures, losses, budget_from,
       timeout
FROM onward.jobs WHERE id IN (SELECT value FROM json_each(:ids))
-- postgres
SELECT CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), args, max_attempts, max_losses,
       failures, losses, budget_from, timeout
FROM onward.jobs WHERE id = ANY(ARRAY(SELECT CAST(value AS uuid) FROM json_array_elements_text(CAST(:ids AS json))))

-- name: prunable
-- How many jobs one prune would take away altogether.
-- sqlite
SELECT count(*) FROM onward.finished WHERE finished_at < onward.clock() - :keep AND state = :state
-- postgres
SELECT count(*) FROM onward.finished
WHERE finished_at < onward.clock() - CAST(:keep AS float8) * interval '1 second' AND state = CAST(:state AS text)
