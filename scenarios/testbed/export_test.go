package testbed

import (
	"cmp"
	"context"
	"fmt"
	"os"
)

var (
	FourLetters = fourLetters
	Identify    = identify
	Watch       = watch
)

var serverTypes = map[string]*serverType{
	"redis": &redisServer, "etcd": &etcd, "zookeeper": &zooKeeper, "consul": &consul, "postgres": &postgres, "s3": &s3,
	"dynamodb": &dynamoDB,
}

func noEngine(err error) error { return &MissingError{"Docker engine", "docker version says why", err} }

// Engine returns an error, for [Need], if no Docker engine answers.
func Engine(ctx context.Context) error {
	engine, err := dialEngine(ctx)
	if err != nil {
		return noEngine(err)
	}
	return engine.Close()
}

// Lacks returns an error, for [Need], if a provider can't run a type of server.
func Lacks(ctx context.Context, p Provider, name string) error {
	t := serverTypes[name]
	if p == Local {
		_, err := t.find(t.program)
		return err
	}
	engine, err := dialEngine(ctx)
	if err != nil {
		return noEngine(err)
	}
	defer func() { _ = engine.Close() }()
	image := cmp.Or(os.Getenv(t.env("IMAGE")), t.image)
	if _, err := engine.Client().ImageInspect(ctx, image); err != nil {
		return &MissingError{t.title + " image", "docker pull " + image + `, or sudo env PATH="$PATH" make images`, fmt.Errorf("%s: %w", image, err)}
	}
	return nil
}
