-- After the database's clock was set back. Due times stand on that clock: what was due an hour ago by the old time would be
-- due an hour from now by the new one, and stand still until then.

-- name: waiting_queues
-- Which queues have queued jobs: one probe a queue, however many jobs there are.
-- both
WITH RECURSIVE line (queue) AS (
    SELECT (SELECT min(queue) FROM onward.job WHERE state = 'queued')
    UNION ALL
    SELECT (SELECT min(queue) FROM onward.job WHERE state = 'queued' AND queue > line.queue)
    FROM line WHERE line.queue IS NOT NULL
)
SELECT queue FROM line WHERE queue IS NOT NULL

-- name: due_again
-- One step: up to :limit jobs of a lane that were due by the old time, :before, are due by the new one, :step seconds earlier,
-- in their order. Left alone is what was given its due time since the step (created, or given back by its last attempt,
-- after :since on the new time), and the retry of a body that could not be stopped, which its worker holds back. Who
-- comes second finds nothing left to move.
-- sqlite
UPDATE onward.job SET run_at = run_at - :step
WHERE id IN (SELECT j.id FROM onward.job AS j
             WHERE j.state = 'queued' AND j.queue = :queue AND j.priority = :priority
               AND j.run_at > onward.clock() AND j.run_at <= :before
               AND j.created_at NOT BETWEEN :since AND onward.clock()
               AND (SELECT a.abandoned OR a.ended_at BETWEEN :since AND onward.clock()
                    FROM onward.attempt AS a WHERE a.job = j.id AND a.number = j.attempt - 1) IS NOT TRUE
             ORDER BY j.run_at, j.id LIMIT :limit)
  AND state = 'queued'
RETURNING id
-- postgres
UPDATE onward.job SET run_at = run_at - CAST(:step AS float8) * interval '1 second'
WHERE id = ANY(ARRAY(
        SELECT j.id FROM onward.job AS j
        WHERE j.state = 'queued' AND j.queue = CAST(:queue AS text) AND j.priority = CAST(:priority AS smallint)
          AND j.run_at > onward.clock() AND j.run_at <= to_timestamp(CAST(:before AS float8))
          AND j.created_at NOT BETWEEN to_timestamp(CAST(:since AS float8)) AND onward.clock()
          AND (SELECT a.abandoned OR a.ended_at BETWEEN to_timestamp(CAST(:since AS float8)) AND onward.clock()
               FROM onward.attempt AS a WHERE a.job = j.id AND a.number = j.attempt - 1) IS NOT TRUE
        ORDER BY j.run_at, j.id LIMIT CAST(:limit AS integer) FOR UPDATE OF j SKIP LOCKED))
  AND state || '' = 'queued'
RETURNING CAST(id AS text)
