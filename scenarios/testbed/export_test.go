package testbed

import (
	"cmp"
	"context"
	"fmt"
	"os"
)

var FourLetters = fourLetters

var serverTypes = map[string]*serverType{
	"redis": &redisServer, "etcd": &etcd, "zookeeper": &zooKeeper, "consul": &consul, "postgres": &postgres, "s3": &s3,
	"dynamodb": &dynamoDB,
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
		return &MissingError{"Docker engine", "run docker version for details", err}
	}
	defer func() { _ = engine.Close() }()
	image := cmp.Or(os.Getenv(t.env("IMAGE")), t.image)
	if _, err := engine.Client().ImageInspect(ctx, image); err != nil {
		return &MissingError{t.title + " image", "docker pull " + image + `, or sudo env PATH="$PATH" make images`, fmt.Errorf("%s: %w", image, err)}
	}
	return nil
}
