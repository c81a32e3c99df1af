package redislock

import (
	"context"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/internal/redisscript"
)

// reapBatch is how many counters one script checks: about a millisecond of the server's time.
const reapBatch = 500

// Reap deletes the fence counters of free keys that nobody has locked for at least idle, to the second. It returns how
// many. It may run at any time, and again after an error. No token goes backwards: the script raises fence-floor to the
// greatest counter that it deletes, and a missing counter starts from there.
//
// Every client of these locks must know the floor: a release of this package from before Reap doesn't. Reap returns an
// error that wraps dlock.ErrInvalid in a Cluster and on a redis.Ring, where one script can't reach all counters and the
// floor, and, if idle is not 0, the server's error under an LFU maxmemory-policy, which keeps no idle times.
func (b *Backend) Reap(ctx context.Context, idle time.Duration) (int64, error) {
	if _, cluster := b.c.(*redis.ClusterClient); cluster || redisscript.IsRing(b.c) {
		return 0, invalid("counters can't be reaped in a Cluster or on a redis.Ring: a script can't reach those of several slots or servers")
	}
	if idle < 0 {
		return 0, invalid("reap counters that have been idle for %v; want 0 or more", idle)
	}
	var (
		reaped int64
		cursor uint64
		before = b.o.Prefix + "fence:{"
		match  = globEscaper.Replace(before) + "*}"
		least  = int64((idle + time.Second - 1) / time.Second)
	)
	for {
		if _, err := b.check("", time.Second); err != nil {
			return reaped, err
		}
		counters, next, err := b.c.Scan(ctx, cursor, match, reapBatch).Result()
		if err != nil {
			return reaped, failed(ctx, err)
		}
		keys := []string{b.floor}
		for _, counter := range counters {
			names := b.names(strings.TrimSuffix(strings.TrimPrefix(counter, before), "}"))
			keys = append(keys, counter, names[0], names[2])
		}
		if len(keys) > 1 {
			n, err := reapScript.Run(ctx, b.c, keys, least).Int64()
			if err != nil {
				return reaped, failed(ctx, err)
			}
			reaped += n
		}
		if cursor = next; cursor == 0 {
			return reaped, nil
		}
	}
}

var globEscaper = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)
