-- Retention: only jobs that ended longer ago than the policy says, in small steps, history with them.

-- name: prune
-- One step: up to :limit jobs that ended in :state more than :keep seconds ago, oldest first. Answers how many went.
-- sqlite
DELETE FROM onward.attempt WHERE job IN (
    SELECT id FROM onward.finished WHERE finished_at < onward.clock() - :keep AND state = :state
    ORDER BY finished_at, id LIMIT :limit);
DELETE FROM onward.refusal WHERE job IN (
    SELECT id FROM onward.finished WHERE finished_at < onward.clock() - :keep AND state = :state
    ORDER BY finished_at, id LIMIT :limit);
DELETE FROM onward.finished WHERE id IN (
    SELECT id FROM onward.finished WHERE finished_at < onward.clock() - :keep AND state = :state
    ORDER BY finished_at, id LIMIT :limit)
RETURNING id
-- postgres
WITH old AS (
    DELETE FROM onward.finished WHERE id = ANY(ARRAY(
        SELECT id FROM onward.finished
        WHERE finished_at < onward.clock() - CAST(:keep AS float8) * interval '1 second' AND state = :state
        ORDER BY finished_at, id LIMIT :limit FOR UPDATE SKIP LOCKED))
    RETURNING id
), history AS (
    DELETE FROM onward.attempt WHERE job = ANY(ARRAY(SELECT id FROM old))
), refused AS (
    DELETE FROM onward.refusal WHERE job = ANY(ARRAY(SELECT id FROM old))
)
SELECT CAST(id AS text) FROM old

-- name: prune_workers
-- Workers that ended long ago and own nothing.
-- sqlite
DELETE FROM onward.worker WHERE state IN ('stopped', 'lost') AND ended_at < onward.clock() - :keep
  AND NOT EXISTS (SELECT 1 FROM onward.job j WHERE j.worker = onward.worker.id)
RETURNING id
-- postgres
DELETE FROM onward.worker AS w
WHERE state IN ('stopped', 'lost') AND ended_at < onward.clock() - CAST(:keep AS float8) * interval '1 second'
  AND NOT EXISTS (SELECT 1 FROM onward.job j WHERE j.worker = w.id)
RETURNING CAST(id AS text)

-- name: size
-- How many bytes the jobs and their history take, with what is free in between.
-- sqlite
SELECT page_count * page_size FROM pragma_page_count, pragma_page_size
-- postgres
SELECT CAST(pg_total_relation_size('onward.job') + pg_total_relation_size('onward.finished')
            + pg_total_relation_size('onward.attempt') + pg_total_relation_size('onward.refusal')
            + pg_total_relation_size('onward.worker') AS bigint)
