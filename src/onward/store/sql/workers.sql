-- Workers and their leases, always on the database's clock.

-- name: register
-- A process start becomes a worker. Its identity is new every time: a restart under the same name is another worker.
-- sqlite
INSERT INTO onward.worker (id, name, host, pid, version, state, queues, tasks, concurrency, idle, lease_until, started_at,
                           beat_at, lock_path)
VALUES (:id, :name, :host, :pid, :version, 'active', :queues, :tasks, :concurrency, 1, onward.clock() + :lease,
        onward.clock(), onward.clock(), :lock_path)
-- postgres
INSERT INTO onward.worker (id, name, host, pid, version, state, queues, tasks, concurrency, idle, lease_until, started_at,
                           beat_at, lock_path)
VALUES (CAST(:id AS uuid), :name, :host, :pid, :version, 'active',
        ARRAY(SELECT json_array_elements_text(CAST(:queues AS json))),
        ARRAY(SELECT json_array_elements_text(CAST(:tasks AS json))), :concurrency, true,
        onward.clock() + CAST(:lease AS float8) * interval '1 second', onward.clock(), onward.clock(), :lock_path)

-- name: beat
-- A renewal never shortens a lease and never revives a worker that was declared lost. No row: I am lost. But a lease whose
-- last renewal lies more than a lease ahead was written by a clock that has gone back since, and would run for as long as
-- that step: it begins anew.
-- sqlite
UPDATE onward.worker
SET lease_until = CASE WHEN beat_at > onward.clock() + :lease THEN onward.clock() + :lease
                       ELSE max(lease_until, onward.clock() + :lease) END,
    beat_at = onward.clock()
WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ('active', 'draining')
RETURNING id
-- postgres
UPDATE onward.worker
SET lease_until = CASE WHEN beat_at > onward.clock() + CAST(:lease AS float8) * interval '1 second'
                       THEN onward.clock() + CAST(:lease AS float8) * interval '1 second'
                       ELSE greatest(lease_until, onward.clock() + CAST(:lease AS float8) * interval '1 second') END,
    beat_at = onward.clock()
WHERE id = ANY(ARRAY(SELECT CAST(value AS uuid) FROM json_array_elements_text(CAST(:ids AS json))))
  AND state IN ('active', 'draining')
RETURNING CAST(id AS text)

-- name: idle
-- Says whether the worker wants to be woken by an enqueue. A hint: the poll beneath is the truth.
-- sqlite
UPDATE onward.worker SET idle = :idle WHERE id = :id AND state IN ('active', 'draining')
-- postgres
UPDATE onward.worker SET idle = CAST(:idle AS boolean) WHERE id = CAST(:id AS uuid) AND state IN ('active', 'draining')

-- name: drain
-- active > draining: claims no more, finishes what runs.
-- sqlite
UPDATE onward.worker SET state = 'draining', idle = 0 WHERE id = :id AND state = 'active' RETURNING id
-- postgres
UPDATE onward.worker SET state = 'draining', idle = false WHERE id = CAST(:id AS uuid) AND state = 'active'
RETURNING CAST(id AS text)

-- name: stop
-- active or draining > stopped: ended in order.
-- sqlite
UPDATE onward.worker SET state = 'stopped', idle = 0, ended_at = onward.clock(), reason = :reason
WHERE id = :id AND state IN ('active', 'draining') RETURNING id
-- postgres
UPDATE onward.worker SET state = 'stopped', idle = false, ended_at = onward.clock(), reason = :reason
WHERE id = CAST(:id AS uuid) AND state IN ('active', 'draining') RETURNING CAST(id AS text)

-- name: lose
-- active or draining > lost. With a lease in :seen, only while that lease is unchanged and over; with none, the death is
-- proven (an exit status, a free lock) and the lease ends here.
-- sqlite
UPDATE onward.worker SET state = 'lost', idle = 0, ended_at = onward.clock(), reason = :reason,
                         lease_until = min(lease_until, onward.clock())
WHERE id = :id AND state IN ('active', 'draining')
  AND (:seen IS NULL OR lease_until = :seen AND lease_until < onward.clock())
RETURNING id
-- postgres
UPDATE onward.worker SET state = 'lost', idle = false, ended_at = onward.clock(), reason = :reason,
                         lease_until = least(lease_until, onward.clock())
WHERE id = CAST(:id AS uuid) AND state IN ('active', 'draining')
  AND (CAST(:seen AS float8) IS NULL
       OR CAST(extract(epoch FROM lease_until) AS float8) = CAST(:seen AS float8) AND lease_until < onward.clock())
RETURNING CAST(id AS text)

-- name: leases
-- Every live worker's lease, whether the database's clock says that it is over, and when it was last renewed: after that
-- clock has gone back, a renewal can leave the lease as it is and yet shows that the worker lives. Also whether that renewal
-- lies more than :step seconds ahead.
-- sqlite
SELECT id, lease_until, lease_until < onward.clock(), lock_path, beat_at, beat_at > onward.clock() + :step
FROM onward.worker WHERE state IN ('active', 'draining')
-- postgres
SELECT CAST(id AS text), CAST(extract(epoch FROM lease_until) AS float8), lease_until < onward.clock(), lock_path,
       CAST(extract(epoch FROM beat_at) AS float8), beat_at > onward.clock() + CAST(:step AS float8) * interval '1 second'
FROM onward.worker WHERE state IN ('active', 'draining')

-- name: redate
-- A lease that was last renewed at :seen, more than :step seconds ahead, was written by a clock that has gone back since: it
-- would hold a dead worker's jobs for as long as that step. It begins anew, as long as it was. A worker that lives has no
-- less than it had, and whoever comes second finds nothing to do. If the row shows no length (a foreign hand's), it is :lease.
-- sqlite
UPDATE onward.worker
SET lease_until = onward.clock()
                  + CASE WHEN lease_until - beat_at BETWEEN 0 AND 86400 THEN lease_until - beat_at ELSE :lease END,
    beat_at = onward.clock()
WHERE id = :id AND state IN ('active', 'draining') AND beat_at = :seen AND beat_at > onward.clock() + :step
RETURNING id
-- postgres
UPDATE onward.worker
SET lease_until = onward.clock()
                  + CASE WHEN extract(epoch FROM lease_until) - extract(epoch FROM beat_at) BETWEEN 0 AND 86400
                         THEN lease_until - beat_at ELSE CAST(:lease AS float8) * interval '1 second' END,
    beat_at = onward.clock()
WHERE id = CAST(:id AS uuid) AND state IN ('active', 'draining')
  AND CAST(extract(epoch FROM beat_at) AS float8) = CAST(:seen AS float8)
  AND beat_at > onward.clock() + CAST(:step AS float8) * interval '1 second'
RETURNING CAST(id AS text)

-- name: orphans
-- Every running or cancelling job whose worker is neither active nor draining, oldest id first. Asked at every sweep, so
-- that a claim which committed under a lost worker is found by the next one. Rows that another sweeper holds are skipped,
-- and those that could not be taken back are left alone, so that they hold up no others. First which owners there are, by a
-- probe for each, then the jobs of those that are gone: what live workers run is not read.
-- sqlite
WITH RECURSIVE owner (id) AS (
    SELECT (SELECT min(worker) FROM onward.job WHERE worker IS NOT NULL)
    UNION ALL
    SELECT (SELECT min(worker) FROM onward.job WHERE worker > owner.id) FROM owner WHERE owner.id IS NOT NULL
), gone (id) AS (
    SELECT id FROM owner
    WHERE id NOT IN (SELECT id FROM onward.worker WHERE state IN ('active', 'draining'))
)
SELECT j.id, j.task, j.queue, j.priority, j.state, j.attempt, j.worker, j.args, j.max_attempts, j.max_losses, j.failures,
       j.losses, j.budget_from, j.timeout, w.reason
FROM onward.job AS j LEFT JOIN onward.worker AS w ON w.id = j.worker
WHERE j.worker IN (SELECT id FROM gone) AND j.id NOT IN (SELECT value FROM json_each(:leave))
ORDER BY +j.id LIMIT :limit
-- postgres
WITH RECURSIVE owner (id) AS (
    SELECT (SELECT worker FROM onward.job WHERE worker IS NOT NULL ORDER BY worker LIMIT 1)
    UNION ALL
    SELECT (SELECT worker FROM onward.job WHERE worker > owner.id ORDER BY worker LIMIT 1) FROM owner
    WHERE owner.id IS NOT NULL
), gone (id) AS (
    SELECT id FROM owner
    WHERE id IS NOT NULL
      AND NOT EXISTS (SELECT 1 FROM onward.worker AS w WHERE w.id = owner.id AND w.state IN ('active', 'draining'))
)
SELECT CAST(j.id AS text), j.task, j.queue, j.priority, j.state, j.attempt, CAST(j.worker AS text), j.args,
       j.max_attempts, j.max_losses, j.failures, j.losses, j.budget_from, j.timeout, w.reason
FROM onward.job AS j LEFT JOIN onward.worker AS w ON w.id = j.worker
WHERE j.worker = ANY(ARRAY(SELECT id FROM gone))
  AND CAST(j.id AS text) <> ALL(ARRAY(SELECT json_array_elements_text(CAST(:leave AS json))))
ORDER BY CAST(j.id AS text) LIMIT :limit FOR UPDATE OF j SKIP LOCKED

-- name: live_among
-- Which of these workers live. Asked by a sweep about the owners of the rows that it has locked: PostgreSQL checks a row that
-- has changed under a lock against the old row of its outer join, and would hand over a job that a live worker has claimed.
-- sqlite
SELECT id FROM onward.worker
WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ('active', 'draining')
-- postgres
SELECT CAST(id AS text) FROM onward.worker
WHERE id = ANY(ARRAY(SELECT CAST(value AS uuid) FROM json_array_elements_text(CAST(:ids AS json))))
  AND state IN ('active', 'draining')

-- name: owned
-- What the database says that this worker owns, without the jobs that it holds anyway: asked with every beat, and arguments
-- can be large.
-- sqlite
SELECT id, task, queue, priority, state, attempt, worker, args, max_attempts, max_losses, failures, losses, budget_from,
       timeout
FROM onward.job WHERE worker = :worker AND id NOT IN (SELECT value FROM json_each(:held))
-- postgres
SELECT CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), args, max_attempts, max_losses,
       failures, losses, budget_from, timeout
FROM onward.job
WHERE worker = CAST(:worker AS uuid)
  AND id NOT IN (SELECT CAST(value AS uuid) FROM json_array_elements_text(CAST(:held AS json)))

-- name: cancelling
-- Which of this worker's jobs have been asked to stop.
-- sqlite
SELECT id, attempt FROM onward.job WHERE worker = :worker AND state = 'cancelling'
-- postgres
SELECT CAST(id AS text), attempt FROM onward.job WHERE worker = CAST(:worker AS uuid) AND state = 'cancelling'

-- name: workers
-- All workers that the database remembers, those that live first, then the newest. Ages and times left are in seconds.
-- sqlite
SELECT w.id, w.name, w.host, w.pid, w.version, w.state, w.queues, w.tasks, w.concurrency, w.idle,
       w.lease_until - onward.clock(), w.started_at, onward.clock() - w.beat_at, w.ended_at, w.reason,
       (SELECT count(*) FROM onward.job j WHERE j.worker = w.id), w.beat_at
FROM onward.worker AS w ORDER BY w.state IN ('active', 'draining') DESC, w.id DESC LIMIT :limit
-- postgres
SELECT CAST(w.id AS text), w.name, w.host, w.pid, w.version, w.state, CAST(to_json(w.queues) AS text),
       CAST(to_json(w.tasks) AS text), w.concurrency, w.idle,
       CAST(extract(epoch FROM w.lease_until - onward.clock()) AS float8),
       CAST(extract(epoch FROM w.started_at) AS float8),
       CAST(extract(epoch FROM onward.clock() - w.beat_at) AS float8),
       CAST(extract(epoch FROM w.ended_at) AS float8), w.reason,
       (SELECT count(*) FROM onward.job j WHERE j.worker = w.id), CAST(extract(epoch FROM w.beat_at) AS float8)
FROM onward.worker AS w ORDER BY w.state IN ('active', 'draining') DESC, w.id DESC LIMIT :limit
