-- What must always hold, as queries that must return no row: `onward doctor` runs them, and so do the tests. Each answers with
-- the id of what breaks the rule and with what is wrong about it. They look at what the constraints and triggers guard, too,
-- because a guard can be dropped.

-- name: check_no_limbo
-- D4: every job is over, or dead, or has a future event: a due time, or a worker under a live lease. A worker that has just
-- ended, or whose lease is just over, has :seconds until a sweep must have taken its jobs back.
-- sqlite
SELECT j.id, CASE
           WHEN j.state NOT IN ('waiting', 'queued', 'running', 'cancelling', 'dead') THEN 'state ' || j.state || ' is none that a job has'
           WHEN j.worker IS NULL THEN j.state || ' without a due time or a worker'
           WHEN w.id IS NULL THEN j.state || ' under a worker that is not known'
           WHEN w.state IN ('active', 'draining') THEN j.state || ' under a worker whose lease is over'
           ELSE j.state || ' under a worker that is ' || w.state END
FROM onward.job AS j LEFT JOIN onward.worker AS w ON w.id = j.worker
WHERE NOT coalesce(j.state = 'dead'
                   OR (j.state IN ('waiting', 'queued') AND j.run_at IS NOT NULL)
                   OR (j.state IN ('running', 'cancelling') AND w.state IN ('active', 'draining')
                       AND w.lease_until > onward.clock() - :seconds)
                   OR (j.state IN ('running', 'cancelling') AND w.state IN ('stopped', 'lost')
                       AND w.ended_at > onward.clock() - :seconds), 0)
LIMIT :limit
-- postgres
SELECT CAST(j.id AS text), CASE
           WHEN j.state NOT IN ('waiting', 'queued', 'running', 'cancelling', 'dead') THEN 'state ' || j.state || ' is none that a job has'
           WHEN j.worker IS NULL THEN j.state || ' without a due time or a worker'
           WHEN w.id IS NULL THEN j.state || ' under a worker that is not known'
           WHEN w.state IN ('active', 'draining') THEN j.state || ' under a worker whose lease is over'
           ELSE j.state || ' under a worker that is ' || w.state END
FROM onward.job AS j LEFT JOIN onward.worker AS w ON w.id = j.worker
WHERE NOT coalesce(j.state = 'dead'
                   OR (j.state IN ('waiting', 'queued') AND j.run_at IS NOT NULL)
                   OR (j.state IN ('running', 'cancelling') AND w.state IN ('active', 'draining')
                       AND w.lease_until > onward.clock() - CAST(:seconds AS float8) * interval '1 second')
                   OR (j.state IN ('running', 'cancelling') AND w.state IN ('stopped', 'lost')
                       AND w.ended_at > onward.clock() - CAST(:seconds AS float8) * interval '1 second'), false)
LIMIT :limit

-- name: check_one_place
-- M2: a job is in the live table or in the cold one, never in both.
-- sqlite
SELECT j.id, 'live as ' || j.state || ' and finished as ' || f.state
FROM onward.job AS j JOIN onward.finished AS f ON f.id = j.id LIMIT :limit
-- postgres
SELECT CAST(j.id AS text), 'live as ' || j.state || ' and finished as ' || f.state
FROM onward.job AS j JOIN onward.finished AS f ON f.id = j.id LIMIT :limit

-- name: check_history_whole
-- M2: attempts 1 to n without gaps, one record for each closed attempt; the latest is open while the job is waiting, queued,
-- running or cancelling, and closed when it is dead or over.
-- sqlite
SELECT j.id, j.state || ' at attempt ' || j.attempt || ' with ' || coalesce(a.records, 0) || ' closed attempts'
       || coalesce(', numbers ' || a.low || ' to ' || a.high, '')
FROM (SELECT id, state, attempt, CASE WHEN state IN ('dead', 'succeeded', 'cancelled') THEN attempt ELSE attempt - 1 END AS closed
      FROM onward.jobs) AS j
LEFT JOIN (SELECT job, count(*) AS records, count(DISTINCT number) AS numbers, min(number) AS low, max(number) AS high
           FROM onward.attempts GROUP BY job) AS a ON a.job = j.id
WHERE coalesce(a.records, 0) <> j.closed OR a.numbers <> a.records OR a.low <> 1 OR a.high <> j.closed
LIMIT :limit
-- postgres
SELECT CAST(j.id AS text), j.state || ' at attempt ' || j.attempt || ' with ' || coalesce(a.records, 0) || ' closed attempts'
       || coalesce(', numbers ' || a.low || ' to ' || a.high, '')
FROM (SELECT id, state, attempt, CASE WHEN state IN ('dead', 'succeeded', 'cancelled') THEN attempt ELSE attempt - 1 END AS closed
      FROM onward.jobs) AS j
LEFT JOIN (SELECT job, count(*) AS records, count(DISTINCT number) AS numbers, min(number) AS low, max(number) AS high
           FROM onward.attempts GROUP BY job) AS a ON a.job = j.id
WHERE coalesce(a.records, 0) <> j.closed OR a.numbers <> a.records OR a.low <> 1 OR a.high <> j.closed
LIMIT :limit

-- name: check_history_owned
-- M2: no attempt without its job.
-- sqlite
SELECT a.job, 'attempt ' || a.number || ' is there, the job is not' FROM onward.attempt AS a
WHERE NOT EXISTS (SELECT 1 FROM onward.job j WHERE j.id = a.job)
  AND NOT EXISTS (SELECT 1 FROM onward.finished f WHERE f.id = a.job)
LIMIT :limit
-- postgres
SELECT CAST(a.job AS text), 'attempt ' || a.number || ' is there, the job is not' FROM onward.attempt AS a
WHERE NOT EXISTS (SELECT 1 FROM onward.job j WHERE j.id = a.job)
  AND NOT EXISTS (SELECT 1 FROM onward.finished f WHERE f.id = a.job)
LIMIT :limit

-- name: check_last_attempt
-- M2: the state of a job and the end of its last attempt agree. Buried means dead; a discarded job keeps its burial.
-- sqlite
SELECT j.id, j.state || ', but attempt ' || j.attempt || ' ended with ' || coalesce(a.event || ' > ' || a.state, 'nothing')
FROM onward.jobs AS j LEFT JOIN onward.attempts AS a ON a.job = j.id AND a.number = j.attempt
WHERE ((j.state = 'dead' OR j.ended_from = 'dead') AND coalesce(a.event, '') <> 'bury')
   OR (j.state = 'succeeded' AND coalesce(a.state, '') <> 'succeeded')
   OR (j.state = 'cancelled' AND coalesce(a.state, 'succeeded') = 'succeeded')
LIMIT :limit
-- postgres
SELECT CAST(j.id AS text),
       j.state || ', but attempt ' || j.attempt || ' ended with ' || coalesce(a.event || ' > ' || a.state, 'nothing')
FROM onward.jobs AS j LEFT JOIN onward.attempts AS a ON a.job = j.id AND a.number = j.attempt
WHERE ((j.state = 'dead' OR j.ended_from = 'dead') AND coalesce(a.event, '') <> 'bury')
   OR (j.state = 'succeeded' AND coalesce(a.state, '') <> 'succeeded')
   OR (j.state = 'cancelled' AND coalesce(a.state, 'succeeded') = 'succeeded')
LIMIT :limit

-- name: check_live_columns
-- M4: the columns of a live job agree with its state: an owner and a start while it runs, an end when it is dead.
-- sqlite
SELECT id, state || ' with' || CASE WHEN worker IS NULL THEN 'out' ELSE '' END || ' a worker, with'
       || CASE WHEN started_at IS NULL THEN 'out' ELSE '' END || ' a start, with'
       || CASE WHEN finished_at IS NULL THEN 'out' ELSE '' END || ' an end, at attempt ' || attempt || ', budgets from ' || budget_from
FROM onward.job
WHERE (state IN ('running', 'cancelling')) <> (worker IS NOT NULL)
   OR (state IN ('running', 'cancelling', 'dead')) <> (started_at IS NOT NULL)
   OR (state = 'dead') <> (finished_at IS NOT NULL)
   OR attempt < 1 OR budget_from NOT BETWEEN 1 AND attempt
LIMIT :limit
-- postgres
SELECT CAST(id AS text), state || ' with' || CASE WHEN worker IS NULL THEN 'out' ELSE '' END || ' a worker, with'
       || CASE WHEN started_at IS NULL THEN 'out' ELSE '' END || ' a start, with'
       || CASE WHEN finished_at IS NULL THEN 'out' ELSE '' END || ' an end, at attempt ' || attempt || ', budgets from ' || budget_from
FROM onward.job
WHERE (state IN ('running', 'cancelling')) <> (worker IS NOT NULL)
   OR (state IN ('running', 'cancelling', 'dead')) <> (started_at IS NOT NULL)
   OR (state = 'dead') <> (finished_at IS NOT NULL)
   OR attempt < 1 OR budget_from NOT BETWEEN 1 AND attempt
LIMIT :limit

-- name: check_finished_columns
-- M4: a finished job ended by a move that the table has (`:moves`: from, event, state, end of the attempt), with the columns
-- that belong to it.
-- sqlite
SELECT id, ended_from || ' > ' || state || ' by ' || event || ', the attempt ' || coalesce(attempt_state, 'closed before')
       || CASE WHEN worker IS NULL THEN ', no worker' ELSE ', a worker' END
       || CASE WHEN result IS NULL THEN ', no result' ELSE ', a result' END
FROM onward.finished
WHERE ended_from || ' ' || event || ' ' || state || ' ' || coalesce(attempt_state, '-') NOT IN (SELECT value FROM json_each(:moves))
   OR (ended_from IN ('running', 'cancelling')) <> (worker IS NOT NULL)
   OR (state = 'succeeded') <> (result IS NOT NULL)
LIMIT :limit
-- postgres
SELECT CAST(id AS text), ended_from || ' > ' || state || ' by ' || event || ', the attempt ' || coalesce(attempt_state, 'closed before')
       || CASE WHEN worker IS NULL THEN ', no worker' ELSE ', a worker' END
       || CASE WHEN result IS NULL THEN ', no result' ELSE ', a result' END
FROM onward.finished
WHERE ended_from || ' ' || event || ' ' || state || ' ' || coalesce(attempt_state, '-')
          NOT IN (SELECT value FROM json_array_elements_text(CAST(:moves AS json)))
   OR (ended_from IN ('running', 'cancelling')) <> (worker IS NOT NULL)
   OR (state = 'succeeded') <> (result IS NOT NULL)
LIMIT :limit

-- name: check_attempt_columns
-- M4: a closed attempt ended by an event that goes with its state (`:ends`). When it ended says nothing: the database's clock
-- may have gone back meanwhile.
-- sqlite
SELECT job, 'attempt ' || number || ' ended with ' || event || ' > ' || state
FROM onward.attempt
WHERE event || ' ' || state NOT IN (SELECT value FROM json_each(:ends))
LIMIT :limit
-- postgres
SELECT CAST(job AS text), 'attempt ' || number || ' ended with ' || event || ' > ' || state
FROM onward.attempt
WHERE event || ' ' || state NOT IN (SELECT value FROM json_array_elements_text(CAST(:ends AS json)))
LIMIT :limit

-- name: check_attempt_numbers
-- L2: each attempt number of a job is closed at most once, and no attempt is closed that the job has not reached. Within the
-- history the primary key sees to it; here history is held against the job, whose last attempt stands in the cold table.
-- sqlite
SELECT a.job, 'attempt ' || a.number || ' is recorded, the job is ' || j.state || ' at attempt ' || j.attempt
FROM onward.attempt AS a JOIN onward.jobs AS j ON j.id = a.job
WHERE a.number > j.attempt OR (a.number = j.attempt AND j.state <> 'dead' AND coalesce(j.ended_from, '') <> 'dead')
LIMIT :limit
-- postgres
SELECT CAST(a.job AS text), 'attempt ' || a.number || ' is recorded, the job is ' || j.state || ' at attempt ' || j.attempt
FROM onward.attempt AS a JOIN onward.jobs AS j ON j.id = a.job
WHERE a.number > j.attempt OR (a.number = j.attempt AND j.state <> 'dead' AND coalesce(j.ended_from, '') <> 'dead')
LIMIT :limit

-- name: check_budgets
-- L4: failures and losses since the last requeue are within their budgets, and the counters in the row are what history says.
-- An attempt that ended while the job was cancelling is charged to nobody; it stands in the cold table.
-- sqlite
SELECT j.id, j.failures || ' failures of ' || j.max_attempts || ' and ' || j.losses || ' losses of ' || j.max_losses
       || ' since attempt ' || j.budget_from || ', history has ' || coalesce(h.failed, 0) || ' and ' || coalesce(h.lost, 0)
FROM onward.jobs AS j LEFT JOIN (
    SELECT a.job, count(CASE WHEN a.state = 'failed' THEN 1 END) AS failed, count(CASE WHEN a.state = 'lost' THEN 1 END) AS lost
    FROM onward.attempt AS a JOIN onward.jobs AS o ON o.id = a.job WHERE a.number >= o.budget_from GROUP BY a.job
) AS h ON h.job = j.id
WHERE coalesce(h.failed, 0) <> j.failures OR coalesce(h.lost, 0) <> j.losses
   OR j.failures > j.max_attempts OR j.losses > j.max_losses + 1
LIMIT :limit
-- postgres
SELECT CAST(j.id AS text), j.failures || ' failures of ' || j.max_attempts || ' and ' || j.losses || ' losses of ' || j.max_losses
       || ' since attempt ' || j.budget_from || ', history has ' || coalesce(h.failed, 0) || ' and ' || coalesce(h.lost, 0)
FROM onward.jobs AS j LEFT JOIN (
    SELECT a.job, count(CASE WHEN a.state = 'failed' THEN 1 END) AS failed, count(CASE WHEN a.state = 'lost' THEN 1 END) AS lost
    FROM onward.attempt AS a JOIN onward.jobs AS o ON o.id = a.job WHERE a.number >= o.budget_from GROUP BY a.job
) AS h ON h.job = j.id
WHERE coalesce(h.failed, 0) <> j.failures OR coalesce(h.lost, 0) <> j.losses
   OR j.failures > j.max_attempts OR j.losses > j.max_losses + 1
LIMIT :limit

-- name: check_dead_reason
-- R2: a job that is dead, or was discarded, says why it died.
-- sqlite
SELECT j.id, 'died at attempt ' || j.attempt || ' without a reason'
FROM onward.jobs AS j LEFT JOIN onward.attempt AS a ON a.job = j.id AND a.number = j.attempt
WHERE (j.state = 'dead' OR j.ended_from = 'dead') AND a.reason IS NULL
LIMIT :limit
-- postgres
SELECT CAST(j.id AS text), 'died at attempt ' || j.attempt || ' without a reason'
FROM onward.jobs AS j LEFT JOIN onward.attempt AS a ON a.job = j.id AND a.number = j.attempt
WHERE (j.state = 'dead' OR j.ended_from = 'dead') AND a.reason IS NULL
LIMIT :limit

-- name: check_quarantine
-- R2: nothing leaves quarantine silently. After a burial the job is dead, or was discarded, or a requeue opened the next
-- attempt and started the budgets from there; and budgets start afresh only after a burial.
-- sqlite
SELECT j.id, 'buried at attempt ' || a.number || ', now ' || j.state || ' at attempt ' || j.attempt || ', budgets from ' || j.budget_from
FROM onward.attempt AS a JOIN onward.jobs AS j ON j.id = a.job
WHERE a.event = 'bury' AND ((a.number < j.attempt AND j.budget_from <= a.number)
                            OR (a.number = j.attempt AND j.state <> 'dead' AND coalesce(j.ended_from, '') <> 'dead'))
UNION ALL
SELECT j.id, 'budgets from attempt ' || j.budget_from || ', but the attempt before was not buried'
FROM onward.jobs AS j LEFT JOIN onward.attempt AS a ON a.job = j.id AND a.number = j.budget_from - 1
WHERE j.budget_from > 1 AND coalesce(a.event, '') <> 'bury'
LIMIT :limit
-- postgres
SELECT CAST(j.id AS text),
       'buried at attempt ' || a.number || ', now ' || j.state || ' at attempt ' || j.attempt || ', budgets from ' || j.budget_from
FROM onward.attempt AS a JOIN onward.jobs AS j ON j.id = a.job
WHERE a.event = 'bury' AND ((a.number < j.attempt AND j.budget_from <= a.number)
                            OR (a.number = j.attempt AND j.state <> 'dead' AND coalesce(j.ended_from, '') <> 'dead'))
UNION ALL
SELECT CAST(j.id AS text), 'budgets from attempt ' || j.budget_from || ', but the attempt before was not buried'
FROM onward.jobs AS j LEFT JOIN onward.attempt AS a ON a.job = j.id AND a.number = j.budget_from - 1
WHERE j.budget_from > 1 AND coalesce(a.event, '') <> 'bury'
LIMIT :limit

-- name: check_workers
-- A worker's row makes sense: a known state, an end if and only if it ended, a lease that somebody ends when it is over (its
-- sweep has :seconds) and that is not so long that it holds jobs for ever.
-- sqlite
SELECT id, state || ', lease for ' || CAST(round(lease_until - onward.clock()) AS INTEGER) || ' s'
       || CASE WHEN ended_at IS NULL THEN '' ELSE ', with an end' END
FROM onward.worker
WHERE NOT coalesce(state IN ('active', 'draining', 'stopped', 'lost') AND (state IN ('stopped', 'lost')) = (ended_at IS NOT NULL)
                   AND (state NOT IN ('active', 'draining')
                        OR lease_until BETWEEN onward.clock() - :seconds AND onward.clock() + 86400), 0)
LIMIT :limit
-- postgres
SELECT CAST(id AS text), state || ', lease for ' || CAST(round(extract(epoch FROM lease_until - onward.clock())) AS text) || ' s'
       || CASE WHEN ended_at IS NULL THEN '' ELSE ', with an end' END
FROM onward.worker
WHERE NOT coalesce(state IN ('active', 'draining', 'stopped', 'lost') AND (state IN ('stopped', 'lost')) = (ended_at IS NOT NULL)
                   AND (state NOT IN ('active', 'draining')
                        OR lease_until BETWEEN onward.clock() - CAST(:seconds AS float8) * interval '1 second'
                                           AND onward.clock() + interval '1 day'), false)
LIMIT :limit

-- name: check_guards
-- What refuses impossible rows (`:guards`, as the migrations make it) is there, says what it said, and is switched on.
-- sqlite
SELECT g.value ->> 'name', CASE WHEN s.name IS NULL THEN 'the trigger is missing' ELSE 'the trigger says something else' END
FROM json_each(:guards) AS g LEFT JOIN sqlite_schema AS s ON s.type = 'trigger' AND s.name = g.value ->> 'name'
WHERE s.sql IS NOT g.value ->> 'text'
LIMIT :limit
-- postgres
WITH guard AS (
    SELECT g.*, (SELECT relnamespace FROM pg_class WHERE oid = CAST('onward.job' AS regclass)) AS home
    FROM json_to_recordset(CAST(:guards AS json)) AS g (kind text, name text, text text)
)
SELECT name, 'the trigger is missing or switched off' FROM guard
WHERE kind = 'trigger' AND NOT EXISTS (
    SELECT 1 FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
    WHERE t.tgname = name AND t.tgenabled IN ('O', 'A') AND c.relnamespace = home)
UNION ALL
SELECT name, 'the function is missing or says something else' FROM guard
WHERE kind = 'function' AND NOT EXISTS (SELECT 1 FROM pg_proc WHERE proname = name AND pronamespace = home AND prosrc = text)
UNION ALL
SELECT name, 'the type is missing or refuses nothing' FROM guard
WHERE kind = 'domain' AND NOT EXISTS (
    SELECT 1 FROM pg_type AS t JOIN pg_constraint AS k ON k.contypid = t.oid
    WHERE t.typname = name AND t.typnamespace = home AND k.convalidated)
LIMIT :limit

-- name: check_sound
-- D6: the database itself is sound. SQLite looks at every page, index and constraint; on PostgreSQL, indexes and constraints
-- that do not hold (pg_amcheck looks deeper).
-- sqlite
SELECT 'the file', integrity_check FROM pragma_integrity_check WHERE integrity_check <> 'ok' LIMIT :limit
-- postgres
SELECT CAST(CAST(i.indexrelid AS regclass) AS text), 'the index is not valid'
FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indrelid
WHERE NOT (i.indisvalid AND i.indisready AND i.indislive)
  AND c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = CAST('onward.job' AS regclass))
UNION ALL
SELECT CAST(k.conname AS text), 'the constraint was never checked against the rows'
FROM pg_constraint AS k
WHERE NOT k.convalidated
  AND k.connamespace = (SELECT relnamespace FROM pg_class WHERE oid = CAST('onward.job' AS regclass))
LIMIT :limit
