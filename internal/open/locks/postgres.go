package locks

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/dlock/pglock"
)

// openPostgres also creates the table of locks if necessary.
func openPostgres(ctx context.Context, s Spec) (*Backend, error) {
	addr, err := s.one()
	if err != nil {
		return nil, err
	}
	if !strings.Contains(addr, "=") && !strings.Contains(addr, "://") { // pgx would misread a bare word
		return nil, fmt.Errorf("locks: the PostgreSQL address %q is not a postgres:// URL, as in postgres://user@host:5432/db", addr)
	}
	config, err := pgxpool.ParseConfig(addr)
	if err != nil {
		return nil, errors.New("locks: the PostgreSQL address is not a postgres:// URL, as in postgres://user@host:5432/db") // it may hold a password
	}
	if s.Dial != nil {
		config.ConnConfig.DialFunc = s.Dial
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	c := client{ping: pool.Ping, close: func() error { return closePool(pool) }}
	if err := pglock.CreateSchema(ctx, pool, nil); err != nil {
		return nil, errors.Join(err, c.close())
	}
	b, err := pglock.New(pool, nil)
	return opened(b, err, c)
}

// closePool waits at most three seconds. After a cancelled call, pgx may take fifteen to ask a silent server to cancel it.
func closePool(pool *pgxpool.Pool) error {
	closed := make(chan struct{})
	go func() {
		pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(3 * time.Second):
	}
	return nil
}
